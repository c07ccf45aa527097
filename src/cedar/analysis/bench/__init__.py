"""Measurements. Figures are ratios or rates of one run; nothing here is a test."""
