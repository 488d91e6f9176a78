"""The look of the report: one style sheet, light or dark as the reader's system is."""

CSS = """
:root { color-scheme: light dark; --page: #ffffff; --panel: #f6f7f9; --line: #dfe3e8; --ink: #1d2329; --soft: #5f6b76; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181c; --panel: #1c2126; --line: #323a42; --ink: #e4e8ec; --soft: #98a4af; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
p { margin: 0 0 12px; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 20px 0 0; }
.figures div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.figures dt { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.figures dd { margin: 0; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures dd small { font-size: 13px; font-weight: 400; color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
figcaption { font-weight: 600; }
figcaption span { display: block; font-weight: 400; font-size: 13px; color: var(--soft); }
svg { display: block; width: 100%; height: auto; margin-top: 6px; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 8px 12px; border-top: 1px solid var(--line); }
thead th { border-top: 0; background: var(--panel); font-weight: 600; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 12em; overflow-y: auto; min-width: 180px; }
.cut { margin: 4px 0 0; font-size: 12px; font-style: italic; }
details { margin-top: 24px; border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; margin: 10px 0 0; }
"""
