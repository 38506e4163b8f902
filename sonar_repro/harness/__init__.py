"""From a command to records: compose, check, plan, sweep, one process per arm."""
