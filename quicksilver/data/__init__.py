"""Text and windows. A dataset is one yaml in conf/dataset and, where files or the hub do not serve, one reader here."""
