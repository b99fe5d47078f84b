"""The configuration, shipped with the package as `quicksilver.conf` (see `quicksilver.harness.config.config_dir`)."""
