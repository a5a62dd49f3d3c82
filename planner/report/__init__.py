"""Plans for people to look at: the numbers behind every picture, and the report as one HTML or Markdown file."""
