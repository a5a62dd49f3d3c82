"""Launch scripts followed without running them: what they would start, and with which words."""

from planner.reading.texts.shell.launchers import Launch, launches
from planner.reading.texts.shell.script import Script, entry_scripts, read_script
from planner.reading.texts.shell.words import Word

__all__ = ["Launch", "Script", "Word", "entry_scripts", "launches", "read_script"]
