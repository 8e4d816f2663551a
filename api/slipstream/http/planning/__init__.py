"""Plans of answers: what an OpenAI body asks for, of which model, as streams to submit."""
