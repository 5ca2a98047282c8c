//! R3, R4: Tests of volumes and health checks that an image or an engine adds without being asked.

use std::fs;

use serde_json::json;

use super::driver::{TestedRunner, shell_argv};
use crate::support::docker_engine::{self, PrivateEngine, docker_output};

/// R4: A volume shows no path that a mount could not show, whatever its name.
#[test]
fn a_volume_that_shows_a_path_of_this_machine_is_refused() {
    let (engine, runner) = (PrivateEngine::connect(), TestedRunner::new());
    let volume = engine.volume_of(&["type=none", "o=bind", "device=/etc"]);
    let result = with_volume(&runner, &volume, "ls /data");
    assert_eq!(result.facts(), json!([false, null, "sandbox_unavailable"]));
    let error = result.json["error"].as_str().unwrap().replace(&volume, "VOLUME");
    insta::assert_snapshot!(error, @"volume `VOLUME` cannot be given to a sandbox: it shows `/etc` instead of a directory of the engine; give a directory as a mount");
    let volume = engine.volume();
    let result = with_volume(&runner, &volume, "ls -d /data");
    assert_eq!(result.json["stdout"], "/data\n", "{}", result.json);
}

/// R5, R8: An engine would create a missing volume, and nothing would remove it.
#[test]
fn a_volume_has_to_be_there() {
    let runner = TestedRunner::new();
    let volume = format!("cogni-absent-{}", std::process::id());
    let result = with_volume(&runner, &volume, "true");
    assert_eq!(result.facts(), json!([false, null, "volume_not_found"]));
    let error = result.json["error"].as_str().unwrap().replace(&volume, "VOLUME");
    insta::assert_snapshot!(error, @"there is no volume `VOLUME`; make it first, the gateway makes none for a run");
    let filter = format!("name={volume}");
    assert_eq!(docker_output(&["volume", "ls", "--quiet", "--filter", &filter]), "");
}

/// R3: A read-only root has no writable directories unless they were requested.
#[test]
fn an_image_adds_no_writable_volume() {
    let (engine, runner) = (PrivateEngine::connect(), TestedRunner::new());
    let image = engine.image(docker_engine::HOST, &["VOLUME /data/"]);
    let flags = ["--image", image.as_str()];
    let result = runner.run(&flags, &["true"]);
    assert_eq!(result.facts(), json!([false, null, "sandbox_unavailable"]));
    let error = result.json["error"].as_str().unwrap().replace(&image, "IMAGE");
    insta::assert_snapshot!(error, @"image `IMAGE` has a `VOLUME` at `/data/`, which would be a writable disk of this machine; give a mount or a volume there, or build the image without the volume");
    let file = spec_with_volume(&runner, &engine.volume());
    let result = runner.run(&[&flags[..], &["--spec", &file]].concat(), &["true"]);
    assert_eq!(result.facts(), json!([true, 0, null]), "{}", result.json);
}

/// R3, R8: The remedy in the error works.
#[test]
fn the_remedy_for_an_images_volume_works() {
    let (engine, runner) = (PrivateEngine::connect(), TestedRunner::new());
    for (volume, instead) in
        [("/workspace", "give the run a workspace, or build"), ("/tmp", "build")]
    {
        let image = engine.image(docker_engine::HOST, &[&format!("VOLUME {volume}")]);
        let result = runner.run(&["--image", &image, "--workspace", "none"], &["true"]);
        let error = result.json["error"].as_str().unwrap();
        let whole =
            format!("a writable disk of this machine; {instead} the image without the volume");
        assert!(error.ends_with(&whole), "{error}");
    }
}

/// R3: A health check would run beside the first process, without the restrictions that the first process applies.
#[test]
fn an_images_check_of_its_health_is_not_started() {
    let (engine, runner) = (PrivateEngine::connect(), TestedRunner::new());
    let check = "HEALTHCHECK --interval=1s CMD touch /workspace/checked";
    let image = engine.image(docker_engine::HOST, &[check]);
    let waits = shell_argv("sleep 5; ls /workspace");
    let result = runner.run(&["--image", &image], &waits);
    assert_eq!((result.facts(), &result.json["stdout"]), (json!([true, 0, null]), &json!("")));
}

fn with_volume(
    runner: &TestedRunner,
    volume: &str,
    script: &str,
) -> crate::support::run_command::Result {
    let file = spec_with_volume(runner, volume);
    runner.run(&["--spec", &file], &shell_argv(script))
}

fn spec_with_volume(runner: &TestedRunner, volume: &str) -> String {
    let file = runner.path().join("run.toml");
    let text = format!("[[volumes]]\nname = \"{volume}\"\ntarget = \"/data\"\naccess = \"rw\"\n");
    fs::write(&file, text).unwrap();
    file.display().to_string()
}
