for (const figure of document.querySelectorAll('.chart')) {
  const {range, kind, along, curves} = JSON.parse(figure.querySelector('script').textContent)
  const area = figure.querySelector('.area'), cursor = figure.querySelector('.cursor')
  const tip = figure.querySelector('.tip')
  const legend = figure.querySelector('.legend'), values = [...legend.querySelectorAll('span')]
  const summaries = values.map(span => span.textContent)
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
    const lines = []
    let at = step
    curves.forEach(({name, x, y}, n) => {
      if (!x.length) return
      const i = nearest(x, step)
      values[n].textContent = text(y[i]) + ' at ' + along + ' ' + x[i].toLocaleString('en')
      if (!lines.length) at = x[i]
      lines.push(name + ' ' + text(y[i]))
    })
    tip.textContent = [along + ' ' + at.toLocaleString('en'), ...lines].join('\n')
    tip.style.cssText = 'display:block;' + (share < 0.5 ? 'left:calc(' + 100 * share + '% + .5rem)' : 'right:calc(' + 100 * (1 - share) + '% + .5rem)')
  }
  area.addEventListener('pointermove', show)
  area.addEventListener('pointerdown', show)
  area.addEventListener('pointerleave', () => {
    cursor.style.display = tip.style.display = 'none'
    legend.style.minHeight = ''
    values.forEach((span, n) => { span.textContent = summaries[n] })
  })
}
