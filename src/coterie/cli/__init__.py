"""The command line: a module for each group of commands, all of them thin."""
