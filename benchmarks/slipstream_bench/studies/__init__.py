"""Programs that answered a question of design; the decisions that rest on them name them."""
