// What a reader does with the page, and what is seen, as JSON in an element of its own.
addEventListener('load', () => {
  const chart = document.querySelector('.chart'), said = chart.nextElementSibling;
  const boxes = [...chart.querySelectorAll('.box')], press = key =>
    document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
  const seen = {narrow: document.documentElement.scrollWidth <= innerWidth, paper: getComputedStyle(document.body).backgroundColor};
  boxes[0].focus(); seen.first = said.textContent === boxes[0].dataset.said;
  press('ArrowRight'); seen.second = document.activeElement === boxes[1] && said.textContent === boxes[1].dataset.said;
  press('End'); seen.last = document.activeElement === boxes[boxes.length - 1];
  press('ArrowRight'); seen.stays = document.activeElement === boxes[boxes.length - 1];
  boxes[2].dispatchEvent(new MouseEvent('mouseenter')); seen.hover = said.textContent === boxes[2].dataset.said;
  const width = chart.querySelector('svg').getBoundingClientRect().width, zoom = document.querySelector('.zoom input');
  zoom.value = 300; zoom.dispatchEvent(new Event('input'));
  const wide = chart.querySelector('svg').getBoundingClientRect().width, inner = chart.clientWidth;
  seen.zoom = Math.abs(wide - 3 * inner) < 2;
  const folded = [...document.querySelectorAll('details')]; seen.folded = folded.every(item => !item.open);
  dispatchEvent(new Event('beforeprint')); seen.printed = folded.every(item => item.open);
  const out = document.createElement('pre'); out.id = 'seen'; out.textContent = JSON.stringify(seen); document.body.append(out);
});
