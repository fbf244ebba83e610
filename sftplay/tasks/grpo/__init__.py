"""The task grpo: the model draws completions of prompts and learns from their rewards, by TRL's GRPOTrainer."""
