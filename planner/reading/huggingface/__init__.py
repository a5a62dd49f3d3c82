"""accelerate configurations and Trainer arguments (reader.py); recipes around them, refused by name (recipes.py)."""
