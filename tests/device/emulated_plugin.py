"""The emulated device and its queued groups, for programs that import a module by its name."""

import emulated
import queued
from emulated import recorded  # noqa: F401

emulated.install()
queued.install()
