"""What people see: report, figures, widgets, index, exports."""
