"""Part of Recoup."""
