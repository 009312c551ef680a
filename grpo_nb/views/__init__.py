"""What a person looks at: pictures, tables, score sheets, and the widgets of the notebooks.

`plots` and `charts` draw, `sheet` shows completions with their scores, `widgets` are for hands.
Nothing here decides anything: a notebook runs the same without it.
"""
