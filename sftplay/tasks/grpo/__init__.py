"""The task grpo: the model samples completions of prompts and learns from their rewards, by TRL's GRPOTrainer."""
