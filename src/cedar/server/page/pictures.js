// Pictures from a file, the clipboard or a drop, made fit to send.

// The largest canvas of the released model has 1.8 million pixels; more would only cost time.
const LONGEST_SIDE = 2048;
const LARGEST_FILE = 1_500_000;
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** The picture files of a paste, drop or file field. */
export function pictureFiles(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

/** A file as {url: data URL, name}; throws an Error in words if it is no picture. */
export async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`“${file.name || "The picture"}” cannot be read as a picture.`);
  }
  const name = file.name || "pasted picture";
  const longest = Math.max(bitmap.width, bitmap.height);
  const fits = longest <= LONGEST_SIDE && file.size <= LARGEST_FILE;
  if (fits && AS_THEY_ARE.includes(file.type)) {
    bitmap.close();
    return { name, url: await dataUrl(file) };
  }
  const scale = Math.min(1, LONGEST_SIDE / longest);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  // JPEG has no transparency: what was clear becomes white, not black.
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return { name, url: canvas.toDataURL("image/jpeg", 0.9) };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`“${file.name}” cannot be read.`)));
    reader.readAsDataURL(file);
  });
}
