for (const figure of document.querySelectorAll('.chart')) {
  const {range, kind, curves} = JSON.parse(figure.querySelector('script').textContent)
  const area = figure.querySelector('.area'), cursor = figure.querySelector('.cursor')
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
    curves.forEach(({x, y}, n) => {
      const i = nearest(x, step)
      if (x.length) values[n].textContent = text(y[i]) + ' at step ' + x[i].toLocaleString('en')
    })
  }
  area.addEventListener('pointermove', show)
  area.addEventListener('pointerdown', show)
  area.addEventListener('pointerleave', () => {
    cursor.style.display = 'none'
    legend.style.minHeight = ''
    values.forEach((span, n) => { span.textContent = summaries[n] })
  })
}
