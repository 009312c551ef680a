"""Environments to learn from, each a file to copy and change."""
