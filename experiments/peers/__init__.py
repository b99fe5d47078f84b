"""Published methods beside ours."""
