"""The command line: app.py holds the commands, options.py their options, output.py and its helpers what they print."""
