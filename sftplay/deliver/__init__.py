"""What is made of a trained model: evaluation, answers, reports."""
