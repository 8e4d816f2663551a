"""What rows with a grammar may sample next: compiling, following, masks."""
