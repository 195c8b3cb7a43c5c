"""Showing what runs found: tables, figures, the page."""
