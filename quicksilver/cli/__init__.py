"""The command line: `quicksilver COMMAND key=value …`. `main` finds a command by its name; each is one file of `commands/`."""
