"""The subcommands of `aquiline`, one module each: `add(parser)` and `run(arguments)`."""
