//! T4: Tests of approvals of programs: an approval is for the program that a person could see, and for no other.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Mutex};

use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::runner::tool_opener::{CompiledTools, RunToolOpener};
use cogni_gateway::sandbox::spec::MountAccess;
use cogni_gateway::tools::approval::ApprovalState;
use cogni_gateway::tools::call_table::MAX_WAITING_CALLS;
use cogni_gateway::tools::job::{ImageIdFuture, JobCall, JobFuture, JobRunner};
use serde_json::{Value, json};

use super::approvals::{AskingApp, open_store};
use super::{execute_tool, read_response};
use crate::support::app::TestApp;
use crate::support::client::build_request;

/// A run with one tool that is a file and asks a person.
struct AskingProgram {
    asking: AskingApp,
    jobs: Arc<RecordedImages>,
}

impl AskingProgram {
    /// Starts with a tool that has these lines. `DIR` in a line stands for the directory of the tool.
    async fn start(lines: &str, prepare: impl Fn(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        prepare(&path);
        let settings = tool_settings(&path, lines);
        let store = open_store(&path);
        let jobs = Arc::new(RecordedImages::default());
        let runner = Some(Arc::clone(&jobs) as Arc<dyn JobRunner>);
        let opener = RunToolOpener {
            jobs: runner,
            approvals: Some(store.clone()),
            ..RunToolOpener::default()
        };
        let app = TestApp::with(|config| {
            config.tools = ToolSettings { opener: Some(Arc::new(opener)), ..settings.clone() };
        })
        .await;
        Self { asking: AskingApp { app, store, directory }, jobs }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.asking.directory.path().join(name)
    }

    async fn ask(&self) -> Value {
        execute_tool(&self.asking.app, json!({"tool": TOOL, "wait": "0s"})).await.1
    }

    /// Asks, changes something, approves, and returns the end of the call.
    async fn approve_after(&self, change: impl Fn()) -> Value {
        let pending = self.ask().await;
        assert_eq!(pending["status"], "pending", "{pending}");
        change();
        self.asking.decide(&pending, true).await;
        let ended = self.asking.end(&pending).await;
        let is_used = ended["status"] == "completed";
        let state = if is_used { ApprovalState::Consumed } else { ApprovalState::Withdrawn };
        assert_eq!(self.asking.row(&pending).await.state, state);
        ended
    }
}

fn tool_settings(directory: &Path, lines: &str) -> ToolSettings {
    let shown = directory.display();
    let lines = lines.replace("DIR", &shown.to_string());
    let tool = format!("name = '{TOOL}'\ndescription = 'Counts'\n{lines}\n");
    fs::write(directory.join("text__count.toml"), tool).unwrap();
    let table = format!(
        "granted = ['{TOOL}']\ndirectory = '{shown}'\n[[rules]]\nname = 'ask'\ntool = '{TOOL}'\napprove = 'ask'\n\
         [approvals]\nhold = '0s'\n"
    );
    ToolSettings { table: Some(toml::from_str(&table).unwrap()), ..ToolSettings::default() }
}

/// The script of a tool is rewritten, or swapped for a copy, between the question and the beginning: the approved call
/// does not run.
#[tokio::test]
async fn a_changed_program_is_not_the_approved_one() {
    let write = |directory: &Path| fs::write(directory.join("script.py"), "print(1)").unwrap();
    let program = AskingProgram::start("argv = ['/bin/true', 'DIR/script.py']", write).await;
    let script = program.path("script.py");
    let swap = || {
        fs::copy(&script, script.with_extension("new")).unwrap();
        fs::rename(script.with_extension("new"), &script).unwrap();
    };
    let changes: [&dyn Fn(); 3] =
        [&|| fs::write(&script, "print(2)").unwrap(), &swap, &|| fs::remove_file(&script).unwrap()];
    for change in changes {
        assert_eq!(program.approve_after(change).await["error"]["code"], "approval_lost");
    }
    assert_eq!((program.asking.executions(), program.jobs.count()), (0, 0));
    fs::write(&script, "print(3)").unwrap();
    assert_eq!(program.approve_after(|| ()).await["status"], "completed");
    assert_eq!((program.asking.executions(), program.jobs.count()), (1, 1));
}

/// Each way in which a program can name a file is covered: by its name in `PATH`, in an option, in a variable, in the text
/// of a shell, and in the first line of a script.
#[tokio::test]
async fn every_file_that_a_program_names_is_covered() {
    let prepare = |directory: &Path| {
        fs::create_dir(directory.join("bin")).unwrap();
        for name in ["bin/mytool", "bin/other", "bin/third", "settings", "more", "code.so", "x.sh"]
        {
            fs::write(directory.join(name), "one").unwrap();
        }
        fs::write(directory.join("bin/script"), "#!/usr/bin/env -S third -u\n").unwrap();
        symlink("settings", directory.join("link")).unwrap();
    };
    let lines = "argv = ['/usr/bin/env', 'mytool', '--settings=DIR/link', '-IDIR/more', '/bin/sh', '-c', 'other;DIR/x.sh --all', 'script', 'no-such-tool']
                 env = { PATH = '/nowhere:DIR/bin', LD_PRELOAD = 'DIR/code.so' }";
    let program = AskingProgram::start(lines, prepare).await;
    for name in ["bin/mytool", "bin/other", "bin/third", "settings", "more", "code.so", "x.sh"] {
        let lost = program.approve_after(|| fs::write(program.path(name), "two").unwrap()).await;
        assert_eq!(lost["error"]["code"], "approval_lost", "{name}");
    }
    // A file that appears under a name, or a link that leads elsewhere, is another program, too.
    let add = || fs::write(program.path("bin/no-such-tool"), "").unwrap();
    assert_eq!(program.approve_after(add).await["error"]["code"], "approval_lost");
    let turn = || {
        fs::remove_file(program.path("link")).unwrap();
        symlink("more", program.path("link")).unwrap();
    };
    assert_eq!(program.approve_after(turn).await["error"]["code"], "approval_lost");
    assert_eq!(program.jobs.count(), 0);
    assert_eq!(program.approve_after(|| ()).await["status"], "completed");
}

/// The name of an image leads to another image after the question: the approved call does not run. An approved call runs
/// by the id of its image.
#[tokio::test]
async fn an_approval_is_for_the_id_of_an_image() {
    let lines = "argv = ['/tool']\nimage = 'tool:1'";
    let program = AskingProgram::start(lines, |_| ()).await;
    let set_image = |id: &str| *program.jobs.image.lock().unwrap() = id.to_owned();
    set_image("sha256:good");
    let lost = program.approve_after(|| set_image("sha256:evil")).await;
    assert_eq!((&lost["error"]["code"], program.jobs.count()), (&json!("approval_lost"), 0));
    set_image("sha256:good");
    assert_eq!(program.approve_after(|| ()).await["status"], "completed");
    let images = program.jobs.images.lock().unwrap().clone();
    assert_eq!(images, [Some("sha256:good".to_owned())]);
    // An image that cannot be found is no program that a person can approve.
    set_image("");
    assert_eq!(program.ask().await["error"]["code"], "approval_lost");
}

/// A call that joins a question, or that a bound refuses, costs no look at the program, however large it is.
#[tokio::test]
async fn only_a_new_question_reads_the_program() {
    let write = |directory: &Path| fs::write(directory.join("script.py"), "print(1)").unwrap();
    let program = AskingProgram::start("argv = ['/bin/true', 'DIR/script.py']", write).await;
    let ask = async |blanks: usize| {
        let blanks = " ".repeat(blanks);
        let body = format!(r#"{{"tool": "{TOOL}", "arguments": {{{blanks}}}, "wait": "0s"}}"#);
        let request = build_request(http::Method::POST, "/tool/exec", &body, &[]);
        read_response(&program.asking.app.client().send(request).await).1
    };
    let mut asked = vec![];
    for blanks in 0..MAX_WAITING_CALLS {
        asked.push(ask(blanks).await["id"].clone());
    }
    // The program cannot be read any more: its path is a link to itself.
    fs::remove_file(program.path("script.py")).unwrap();
    symlink("script.py", program.path("script.py")).unwrap();
    for (blanks, id) in asked.iter().enumerate() {
        assert_eq!(ask(blanks).await["id"], *id);
    }
    let refused = ask(MAX_WAITING_CALLS).await;
    assert_eq!(refused["error"]["code"], "too_many_approvals");
}

/// A rule that asks about a program that no digest covers is refused when the files are loaded.
#[test]
fn a_program_without_a_digest_cannot_ask() {
    let problem = |lines: &str| {
        let directory = tempfile::tempdir().unwrap();
        let settings = tool_settings(directory.path(), lines);
        CompiledTools::from_settings(&settings).map(|_| ()).unwrap_err().to_string()
    };
    let errors = [
        "argv = ['/bin/sh', '/workspace/build.sh']\nworkspace = 'ro'",
        "argv = ['/usr/bin/make']\nworkspace = 'rw'",
        "argv = ['/tool']\nimage = 'tool:1'\nworkspace = 'ro'",
        "argv = ['/bin/sh', '-c', 'cd ../usr/lib/;./tool']",
        "argv = ['/usr/bin/python3', '-m', 'tool']\nenv = { PYTHONPATH = '/nowhere:/usr/lib' }",
        &format!(
            "argv = ['/bin/sh', '-c', '{}']",
            (0..2000).map(|n| format!("n{n}")).collect::<Vec<_>>().join(" ")
        ),
    ];
    insta::assert_snapshot!(errors.map(problem).join("\n"), @r#"
    `tools.rules[0].approve`: an approval cannot cover the program: the tool has the run's workspace, which the run can change after a person's answer; set `workspace = "none"` in the tool's file
    `tools.rules[0].approve`: an approval cannot cover the program: the tool has the run's workspace, which the run can change after a person's answer; set `workspace = "none"` in the tool's file
    `tools.rules[0].approve`: an approval cannot cover the program: the tool has the run's workspace, which the run can change after a person's answer; set `workspace = "none"` in the tool's file
    `tools.rules[0].approve`: an approval cannot cover the program: the tool names the directory `/usr/lib/`, whose files a digest does not cover; name the files, or put them into an image
    `tools.rules[0].approve`: an approval cannot cover the program: the tool names the directory `/usr/lib`, whose files a digest does not cover; name the files, or put them into an image
    `tools.rules[0].approve`: an approval cannot cover the program: the tool's `argv` and `env` have more than 1024 names; put the program into a file
    "#);
    // A tool that reads the arguments of its call, and names what a sandbox has for itself, can ask.
    let directory = tempfile::tempdir().unwrap();
    let lines = "argv = ['/usr/bin/python3', '-c', 'open(\"/tmp/x\").read() / 2', '${ARGUMENTS_FILE}', '/workspace', '/']";
    CompiledTools::from_settings(&tool_settings(directory.path(), lines)).unwrap();
}

/// A runner of jobs that runs nothing, and keeps the image of each call.
#[derive(Default)]
struct RecordedImages {
    /// The id that the name of every image leads to.
    image: Mutex<String>,
    images: Mutex<Vec<Option<String>>>,
}

impl RecordedImages {
    fn count(&self) -> usize {
        self.images.lock().unwrap().len()
    }
}

impl JobRunner for RecordedImages {
    fn run_job(&self, call: JobCall) -> JobFuture {
        self.images.lock().unwrap().push(call.image);
        Box::pin(async { Ok("1".to_owned()) })
    }

    fn resolve_image(&self, name: &str) -> ImageIdFuture {
        assert_eq!(name, "tool:1");
        let id = self.image.lock().unwrap().clone();
        let found = (!id.is_empty()).then_some(id);
        Box::pin(async move { found.ok_or_else(|| std::io::ErrorKind::NotFound.into()) })
    }

    fn workspace_access(&self) -> Option<MountAccess> {
        None
    }
}

const TOOL: &str = "text__count";
