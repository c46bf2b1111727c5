"""What was measured or simulated: recorded, compared, drawn and reported."""
