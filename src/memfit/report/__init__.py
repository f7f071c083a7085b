"""What people read: the terminal (rich), one self-contained HTML page (Jinja2, inline SVG) and JSON."""
