"""What a gradient worker and a gradient server say to each other."""
