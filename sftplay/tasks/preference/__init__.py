"""Learn which of two answers is better: DPO, IPO, KTO, ORPO and SimPO (tasks dpo, ipo, kto, orpo, simpo)."""
