// Messages for where the page cannot work. Not a module: browsers load no modules from file:// addresses.

/** Shows what is wrong, and the command that helps, in place of the page. */
function showProblem(title, message, command) {
  const section = document.getElementById("problem");
  const code = section.querySelector("code");
  section.querySelector("h2").textContent = title;
  section.querySelector("p").textContent = message;
  code.textContent = command ?? "";
  code.parentElement.hidden = !command;
  section.hidden = false;
  for (const id of ["loading", "page"]) document.getElementById(id).hidden = true;
}

function showScriptProblem() {
  addEventListener("DOMContentLoaded", () => {
    if (location.protocol === "file:") {
      showProblem(
        "This page needs a web server",
        "Browsers load no modules and no models from files. Serve the folder on your machine, and open http://localhost:8000:",
        "python3 -m http.server 8000 --bind localhost --directory examples/web",
      );
    } else {
      showProblem("The page's scripts cannot be loaded", "The server must send main.js, and send .js and .mjs files as text/javascript.");
    }
  });
}
