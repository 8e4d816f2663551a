"""What a chaos run asks for, and what the right answers are."""
