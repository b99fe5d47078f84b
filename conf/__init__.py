"""The configuration, shipped with the package as `quicksilver.conf` (see `quicksilver.runs.config.config_dir`)."""
