"""The commands: classes of `quicksilver.cli.arguments.Command`, named in `quicksilver.cli.main.COMMANDS`."""
