"""Workspace: who allocates it, which other memory may serve as workspace, and when a part of it is free again."""
