"""accelerate configurations and Trainer arguments (reader.py), and recipes around them, refused by name (recipes.py)."""
