"""Example environments, each in one file to copy and change."""
