"""Checks of whole stacks and of a card, over minutes to hours: not in the wheel."""
