// Looks at the built site in a browser: screenshots of every page (or of those named) at three widths, light and dark, and what is cut.
//
//   make docs
//   mkdir -p /tmp/screens && cd /tmp/screens && npm install puppeteer-core @sparticuz/chromium
//   node <repository>/.ci/screens.mjs <repository>/site pictures [page/ ...]
//
// Fails if a page is wider than the window, if code is cut, or if a table is cut at the greatest width. (In narrower windows wide tables scroll.)
import fs from 'node:fs';
import http from 'node:http';
import { createRequire } from 'node:module';
import path from 'node:path';

const require = createRequire(path.join(process.cwd(), 'package.json'));
const puppeteer = require('puppeteer-core');
const chromium = (await import(require.resolve('@sparticuz/chromium'))).default;
const [site, out, ...named] = process.argv.slice(2);
const WIDTHS = [390, 1000, 1400];
const TYPES = {'.html': 'text/html', '.css': 'text/css', '.js': 'text/javascript', '.svg': 'image/svg+xml', '.png': 'image/png'};

const server = http.createServer((request, response) => {
  let file = path.join(site, decodeURIComponent(new URL(request.url, 'http://localhost').pathname));
  if (fs.existsSync(file) && fs.statSync(file).isDirectory()) file = path.join(file, 'index.html');
  response.writeHead(fs.existsSync(file) ? 200 : 404, {'content-type': TYPES[path.extname(file)] ?? 'application/octet-stream'});
  if (fs.existsSync(file)) fs.createReadStream(file).pipe(response); else response.end();
}).listen(0);

const cutIn = () => {
  const wide = element => element.scrollWidth - element.clientWidth;
  const code = [...document.querySelectorAll('.md-content pre > code')].filter(element => wide(element) > 1);
  const tables = [...document.querySelectorAll('.md-content .md-typeset__scrollwrap')].filter(element => wide(element) > 1);
  const first = element => element.textContent.trim().slice(0, 40);
  return {page: wide(document.scrollingElement) > 1 ? ['the page'] : [], code: code.map(first), tables: tables.map(first)};
};

const pages = named.length ? named : fs.readdirSync(site, {recursive: true})
  .filter(file => path.basename(file) === 'index.html').map(file => file.slice(0, -'index.html'.length));
const browser = await puppeteer.launch({args: chromium.args, executablePath: await chromium.executablePath(), headless: 'shell'});
fs.mkdirSync(out, {recursive: true});
let failures = 0;
for (const page of pages) for (const width of WIDTHS) for (const scheme of ['light', 'dark']) {
  const tab = await browser.newPage();
  await tab.setViewport({width, height: 900});
  await tab.emulateMediaFeatures([{name: 'prefers-color-scheme', value: scheme}]);
  await tab.evaluateOnNewDocument(() => localStorage.clear());  // where the palette is kept
  await tab.goto(`http://localhost:${server.address().port}/${page}`, {waitUntil: 'load'});
  await new Promise(resolve => setTimeout(resolve, 250));
  const cut = await tab.evaluate(cutIn);
  const found = [...cut.page, ...cut.code, ...(width === Math.max(...WIDTHS) ? cut.tables : [])];
  if (found.length && scheme === 'light') console.log(`${page || 'index'} at ${width}: cut: ${found.join(' | ')}`);
  failures += found.length;
  const height = Math.min(3000, await tab.evaluate(() => document.documentElement.scrollHeight));
  await tab.screenshot({path: path.join(out, `${page.replace(/\W+/g, '-') || 'index'}${width}-${scheme}.png`), clip: {x: 0, y: 0, width, height},
                        captureBeyondViewport: true});
  await tab.close();
}
await browser.close();
server.close();
process.exitCode = failures ? 1 : 0;
