"""What is fitted to a frozen model on calibration text: maps that predict K and V (`quicksilver.modules.fitted`)."""
