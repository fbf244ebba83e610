"""The frame of a page that stands alone: style, script, and a policy under which it can fetch nothing.

It knows nothing of runs. Read on a phone, on a desk and on paper, in light and dark, and without the script.
"""

from __future__ import annotations

import base64
import hashlib

from sftplay.deliver.report.figures import escaped

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d5dae0;--panel:#f5f7f9;
--a:#0b5cad;--b:#a8480a;--c:#4c6b1f;--d:#7a3e9d;--good:#116329;--bad:#a40e26;--warn:#7d4e00;
--learned:#dff3e4;--learned-ink:#0d4a20;--read-ink:#57606a}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e7eaee;--soft:#a3acb6;--rule:#3a424b;--panel:#1d2228;
--a:#79b8ff;--b:#ffab70;--c:#b5d67e;--d:#d2a8ff;--good:#6fd58b;--bad:#ff9a94;--warn:#f0c067;
--learned:#123d22;--learned-ink:#b5f0c7;--read-ink:#a3acb6}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:70rem;padding:1.25rem 1rem 3rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums}
h1,h2,h3{line-height:1.2;text-wrap:balance;overflow-wrap:anywhere}
h1{font-size:1.75rem;margin:0}
h2{font-size:1.25rem;margin:2.5rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:1.5rem 0 .5rem}
p{margin:.5rem 0;max-width:46rem}
small,.soft{color:var(--soft);font-size:.875rem}
a{color:var(--a)}
code,pre,.text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.85rem}
code{overflow-wrap:anywhere}
pre,.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}
pre{background:var(--panel);border:1px solid var(--rule);border-radius:.4rem;padding:.75rem;margin:.5rem 0}
header p{margin:.25rem 0}
.state{display:inline-block;padding:.05rem .6rem;border:1px solid;border-radius:1rem;font-weight:600;font-size:.875rem}
.good{color:var(--good)}.bad{color:var(--bad)}.caution{color:var(--warn)}
nav{margin:1rem 0 0;font-size:.875rem;display:flex;flex-wrap:wrap;gap:.25rem 1rem}
nav a{padding:.2rem 0}
.keys{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,10rem),1fr));gap:.6rem;margin:1.25rem 0 0}
.keys div{background:var(--panel);border:1px solid var(--rule);border-radius:.5rem;padding:.6rem .8rem}
.keys dt{font-size:.8rem;color:var(--soft)}
.keys dd{margin:.1rem 0 0;font-size:1.125rem;font-weight:600;overflow-wrap:anywhere;line-height:1.3}
.keys dd small{display:block;font-weight:400}
.findings{list-style:none;margin:0;padding:0;display:grid;gap:.4rem}
.findings li{padding:.4rem .75rem;border-left:.25rem solid var(--soft);background:var(--panel);overflow-wrap:anywhere}
.findings .stop{border-color:var(--bad)}.findings .warn{border-color:var(--warn)}
.findings b{font-size:.8rem;margin-right:.4rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1.25rem 1.5rem}
.chart{margin:0;min-width:0;break-inside:avoid}
.chart.big{grid-column:1/-1}
figcaption{font-weight:600;margin-bottom:.6rem}
figcaption small{font-weight:400}
.plot{display:grid;grid-template-columns:auto 1fr;gap:0 .5rem;font-size:.75rem;color:var(--soft)}
.area{position:relative;height:9rem}
.big .area{height:14rem}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;display:block}
.up{position:relative}
.up span{position:absolute;right:0;transform:translateY(-50%);line-height:1;white-space:nowrap}
.across{grid-column:2;position:relative;height:1.5rem}
.across span{position:absolute;top:.35rem;transform:translateX(-50%);line-height:1}
.across .first{transform:none}.across .last{transform:translateX(-100%)}
.grid{stroke:var(--rule);stroke-width:1;vector-effect:non-scaling-stroke}
.line{fill:none;stroke-width:2;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.pale{opacity:.35;stroke-width:1}
.dots{fill:none;stroke-width:7;stroke-linecap:round;vector-effect:non-scaling-stroke}
.resume{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:4 4;vector-effect:non-scaling-stroke}
line.bad{stroke:var(--bad);stroke-width:3;opacity:.6;vector-effect:non-scaling-stroke}
path.a{stroke:var(--a)}path.b{stroke:var(--b)}path.c{stroke:var(--c)}path.d{stroke:var(--d)}
.legend{list-style:none;margin:.25rem 0 0;padding:0;font-size:.8rem;color:var(--soft)}
.legend li::before{content:"";display:inline-block;width:.9em;height:.2em;margin-right:.45em;vertical-align:middle;
background:var(--a);print-color-adjust:exact;-webkit-print-color-adjust:exact}
.legend .b::before{background:var(--b)}.legend .c::before{background:var(--c)}.legend .d::before{background:var(--d)}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--ink);display:none;pointer-events:none}
.wide{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;font-size:.9rem}
.n b{display:block;font-size:.8rem}
caption{text-align:left;font-weight:600;padding-bottom:.35rem}
th,td{padding:.35rem .8rem .35rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);
font-weight:400;overflow-wrap:break-word}
td:last-child,th:last-child{padding-right:0}
thead th{font-size:.8rem;color:var(--soft);white-space:nowrap}
.n{text-align:right;white-space:nowrap}
tbody th code{white-space:nowrap}
.bar{display:inline-block;height:.7em;min-width:2px;background:var(--a);border-radius:2px;vertical-align:middle;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.bars td:nth-child(2){width:60%;min-width:8rem}
.bars table{width:100%;max-width:40rem}
.facts{margin:.5rem 0;display:grid;gap:.15rem 1.5rem}
.facts div{display:grid;grid-template-columns:minmax(8rem,14rem) 1fr;gap:.75rem;padding:.2rem 0}
.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere}
.answers{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr))}
.answer{border:1px solid var(--rule);border-radius:.5rem;padding:.6rem .8rem;break-inside:avoid;min-width:0}
.answer h3{margin:0 0 .3rem;font-size:.8rem;color:var(--soft);font-weight:400}
.answer dl{margin:0;display:grid;grid-template-columns:8rem 1fr;gap:.2rem .75rem}
.answer dt{color:var(--soft);font-size:.85rem}.answer dd{margin:0;min-width:0}
.verdict{font-size:.8rem;font-weight:600;white-space:nowrap}
.tokens{line-height:1.9;border:1px solid var(--rule);border-radius:.5rem;padding:.6rem .8rem;margin:.5rem 0}
.tokens i{font-style:normal;color:var(--read-ink);border-right:1px solid var(--rule)}
.tokens mark{background:none;color:inherit}
.tokens mark i{background:var(--learned);color:var(--learned-ink);font-weight:600;border-bottom:2px solid var(--good);
padding:.1rem 0;print-color-adjust:exact;-webkit-print-color-adjust:exact}
details summary{cursor:pointer;padding:.4rem 0;font-weight:600}
footer{margin-top:3rem;color:var(--soft);font-size:.8rem}
:focus-visible{outline:2px solid var(--a);outline-offset:2px}
@media (max-width:36rem){.answer dl{grid-template-columns:1fr;gap:0}.answer dd{margin-bottom:.4rem}
.facts div{grid-template-columns:1fr;gap:0}
h1{font-size:1.45rem}
.stack thead{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
.stack table,.stack tbody,.stack th,.stack td{display:block;width:auto}
.stack tr{display:flex;flex-wrap:wrap;gap:0 1rem;border-bottom:1px solid var(--rule);padding:.35rem 0}
.stack th,.stack td{border:0;padding:.05rem 0}
.stack td:nth-child(3){color:var(--soft);flex-basis:100%}.stack code{white-space:normal}}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#000;--soft:#3d444d;--rule:#c3c9d0;--panel:#fff;--a:#0b5cad;
--b:#a8480a;--c:#4c6b1f;--d:#7a3e9d;--good:#116329;--bad:#a40e26;--warn:#7d4e00;--learned:#dff3e4;--learned-ink:#0d4a20;
--read-ink:#3d444d}
@page{margin:14mm}
body{max-width:none;padding:0;font-size:10pt}nav{display:none}h2{break-after:avoid;margin-top:1.5rem}
tr,li,.facts div{break-inside:avoid}.wide{overflow:visible}.charts,.answers{grid-template-columns:1fr 1fr}
.area{height:6rem}.big .area{height:10rem}
details::details-content{content-visibility:visible;display:block;height:auto}}
"""

SCRIPT = """
for (const figure of document.querySelectorAll('.chart')) {
  const {range, kind, lines} = JSON.parse(figure.querySelector('script').textContent)
  const area = figure.querySelector('.area'), cursor = figure.querySelector('.cursor')
  const legend = figure.querySelector('.legend'), told = [...legend.querySelectorAll('span')]
  const summaries = told.map(span => span.textContent)
  const text = v => kind === 'bytes' ? (v / 2 ** 30).toFixed(3) + ' GiB'
    : kind === 'share' ? (100 * v).toFixed(1) + ' %' : String(Number(v.toPrecision(5)))
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1
    while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low
  }
  const show = event => {
    const box = area.getBoundingClientRect()
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))
    const step = range[0] + share * (range[1] - range[0])
    cursor.style.cssText = 'display:block;left:' + 100 * share + '%'
    legend.style.minHeight ||= legend.offsetHeight + 'px'
    lines.forEach(({x, y}, n) => {
      const i = nearest(x, step)
      if (x.length) told[n].textContent = text(y[i]) + ' at step ' + x[i].toLocaleString('en')
    })
  }
  area.addEventListener('pointermove', show)
  area.addEventListener('pointerdown', show)
  area.addEventListener('pointerleave', () => {
    cursor.style.display = 'none'
    legend.style.minHeight = ''
    told.forEach((span, n) => { span.textContent = summaries[n] })
  })
}
"""


def frame(title: str, body: str) -> str:
    """A whole document around `body`, which is HTML already."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # Only this very script runs, nothing is fetched: text of a run that got through as markup could still do nothing.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def section(anchor: str, title: str, body: str) -> str:
    """A part of the page under a heading that the contents lead to; empty when its body is."""
    heading = f'<h2 id="{anchor}">{escaped(title)}</h2>'
    return f'<section aria-labelledby="{anchor}">{heading}\n{body}</section>\n' if body else ""


def folded(title: str, body: str) -> str:
    """What few readers need, behind a line they can open; open on paper."""
    return f"<details><summary>{escaped(title)}</summary>{body}</details>" if body else ""
