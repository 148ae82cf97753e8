"""Faults: `fault_plan` decides by a seed which ones a run has (pure), `nemesis` injects them into its processes."""
