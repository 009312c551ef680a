"""GRPO notebook workbench: teach a language model a verifiable skill, and see that it did.

The four notebooks call the modules of this package; README.md says how to start.
"""

import atexit
import gc

__version__ = "0.1.0"

# Python ends by searching all that is there for cycles, which with torch and Unsloth loaded takes
# 2 s, four times a run. What is frozen is not searched.
atexit.register(gc.freeze)
