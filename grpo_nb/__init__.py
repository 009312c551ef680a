"""GRPO notebook workbench: teach a language model a verifiable skill, and prove the gain.

The notebooks call the modules of this package; README.md says how to start.
"""

__version__ = "0.1.0"
