"""Texts in formats that several frameworks share: lenient JSON, YAML with line numbers, shell scripts."""
