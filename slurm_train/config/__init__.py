"""From files and the command line to one typed, checked configuration. Imports no torch and no code of the user."""
