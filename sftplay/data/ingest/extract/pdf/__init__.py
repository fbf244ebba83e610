"""Words and their places on PDF pages -> columns, rows, tables, paragraphs and headings."""
