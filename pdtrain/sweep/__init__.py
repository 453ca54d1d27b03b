"""`pdtrain sweep`: layouts and settings tried for real in short runs, and the plan's constants fitted to them."""
