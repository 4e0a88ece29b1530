"""The command line: verbs, arguments, help, completion and the terminal."""
