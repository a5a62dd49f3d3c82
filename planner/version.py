"""The version of the product; CHANGELOG.md has an entry for each."""

__version__ = "0.1.0"
