// Numbers in words and units. Pure functions.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export const count = (number) => WHOLE.format(number);

/** "1 token", "2 tokens". */
export const counted = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;

/** Three figures: 0.123, 1.23, 12.3, 1,234. */
export function short(number) {
  const size = Math.abs(number);
  if (size >= 99.95 || Number.isInteger(number)) return WHOLE.format(number);
  const places = size >= 9.995 ? 1 : 2;
  return number.toFixed(places).replace(/\.?0+$/, "");
}

/** Bytes in decimal units. */
export function bytes(number) {
  let unit = 0;
  while (Math.abs(number) >= 999.5 && unit < UNITS.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${short(number)} ${UNITS[unit]}`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

export function seconds(number) {
  if (number < 60) return `${short(number)} s`;
  return `${Math.floor(number / 60)} min ${Math.round(number % 60)} s`;
}

/** What an effort from 1 to 100 is called; numbers between the names have none. */
export function effortName(effort) {
  return { 50: "low", 75: "high", 100: "max" }[effort] ?? "";
}
