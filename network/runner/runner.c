//go:build ignore

/*
 * runner stands in for a CNI plugin: it enters the cgroup of the run that it
 * was started for, runs the plugin of the same name, hands on what that says,
 * and notes what became of it. doc.go tells the files that it reads and writes.
 *
 * Which run that is follows from the path by which it was executed (AT_EXECFN
 * of getauxval(3)): RUN/pFROM/PLUGIN. No variable of the environment says so.
 * No libc: it has to start as fast as a process can.
 */
#if defined(__x86_64__)
enum {
	READ = 0, WRITE = 1, CLOSE = 3, RT_SIGPROCMASK = 14, PWRITE64 = 18, NANOSLEEP = 35, GETPID = 39, EXECVE = 59, WAIT4 = 61, KILL = 62,
	PRCTL = 157, CLOCK_GETTIME = 228, EXIT_GROUP = 231, OPENAT = 257, SYMLINKAT = 266,
	PPOLL = 271, DUP3 = 292, PIPE2 = 293, CLONE3 = 435,
};

static long call(long number, long a, long b, long c, long d, long e)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	__asm__ volatile("syscall"
		: "=a"(result)
		: "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
		: "rcx", "r11", "memory");
	return result;
}

__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall start\n");
#elif defined(__aarch64__)
enum {
	READ = 63, WRITE = 64, PWRITE64 = 68, CLOSE = 57, RT_SIGPROCMASK = 135, NANOSLEEP = 101, GETPID = 172, EXECVE = 221, WAIT4 = 260,
	PRCTL = 167, CLOCK_GETTIME = 113, EXIT_GROUP = 94, KILL = 129, OPENAT = 56, SYMLINKAT = 36,
	PPOLL = 73, DUP3 = 24, PIPE2 = 59, CLONE3 = 435,
};

static long call(long number, long a, long b, long c, long d, long e)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	__asm__ volatile("svc #0"
		: "+r"(x0)
		: "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
		: "memory");
	return x0;
}

__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tmov x0, sp\n\tbl start\n");
#else
#error "runner knows the system calls of x86_64 and aarch64 only"
#endif

typedef unsigned long size;

enum {
	AT_FDCWD = -100, AT_NULL = 0, AT_EXECFN = 31,
	O_RDONLY = 0, O_WRONLY = 1, O_CREAT = 0100, O_EXCL = 0200, O_CLOEXEC = 02000000,
	ENOENT = 2, EINTR = 4, ENOEXEC = 8, ENOMEM = 12, EACCES = 13, EEXIST = 17, ETXTBSY = 26,
	SIG_BLOCK = 0, SIG_SETMASK = 2, SIGKILL = 9, SIGPIPE = 13, SIGCHLD = 17,
	PR_SET_PDEATHSIG = 1, CLOCK_REALTIME = 0, CLOCK_MONOTONIC = 1,
	CLONE_PIDFD = 0x1000, POLLIN = 1,
};
static const unsigned long CLONE_INTO_CGROUP = 0x200000000UL;

enum {
	PATH = 4096, /* PATH_MAX */
	OUT = 256 << 10, /* what a plugin answers, kept until it has ended */
	MOST_OUT = 4 << 20, /* of an answer; the daemon keeps it all in memory */
	MOST_ERR = 64 << 10, /* of stderr that is handed on, for the same reason */
	TAIL = 4 << 10, /* the end of what it writes to stderr */
	NOTED = 16 << 10, /* of an answer that is an error */
	SHOWN = 256, /* of one that is no result */
	MOST_AFTER = 64, /* reads of what is in a pipe when the plugin has ended */
	BUSY_TRIES = 5, /* as libcni has it */
};

struct poll { int fd; short events, revents; };
struct time { long s, ns; };
struct clone { unsigned long flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup; };

/* What the daemon wrote into the file RUN/run, and where this plugin stands. */
static char run[PATH], from[PATH], *plugin;
static char settings[64 << 10], *settings_end;
static char *version, *entrance, *chain, *directories, *programs;
static char note_path[PATH], errors_path[PATH], links[PATH], *real;
static int note, kept_errors = -1;
static char out[OUT], err[TAIL];
static size out_length, err_length, out_written;
static size out_passed, err_passed; /* what was handed on of each */
static long plugin_pid;
static int too_much;
static const char *verb;

void *memset(void *to, int byte, size n)
{
	for (char *p = to; n--;)
		*p++ = byte;
	return to;
}

void *memcpy(void *to, const void *from_, size n)
{
	const char *q = from_;
	for (char *p = to; n--;)
		*p++ = *q++;
	return to;
}

static size length(const char *s)
{
	size n = 0;
	while (s[n])
		n++;
	return n;
}

static int same(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

static const char *after(const char *s, const char *prefix)
{
	while (*prefix)
		if (*s++ != *prefix++)
			return 0;
	return s;
}

static char *append(char *end, const char *s)
{
	size n = length(s);
	memcpy(end, s, n + 1);
	return end + n;
}

static char *append_number(char *end, unsigned long n)
{
	char digits[24], *p = digits + sizeof digits - 1;
	*p = 0;
	do
		*--p = '0' + n % 10;
	while (n /= 10);
	return append(end, p);
}

static unsigned long number(const char *s)
{
	unsigned long n = 0;
	while (*s >= '0' && *s <= '9')
		n = n * 10 + *s++ - '0';
	return n;
}

static void write_all(int fd, const char *s, size n)
{
	while (n > 0) {
		long w = call(WRITE, fd, (long)s, n, 0, 0);
		if (w == -EINTR)
			continue;
		if (w <= 0)
			return;
		s += w, n -= w;
	}
}

static unsigned long now(int clock)
{
	struct time t;
	call(CLOCK_GETTIME, clock, (long)&t, 0, 0, 0);
	return t.s * 1000000000UL + t.ns;
}

__attribute__((noreturn)) static void quit(int code)
{
	for (;;)
		call(EXIT_GROUP, code, 0, 0, 0, 0);
}

/* The text of the errors that a run of a plugin can meet. */
static const char *text_of(long error)
{
	switch (error) {
	case ENOENT: return "no such file or directory";
	case ENOEXEC: return "exec format error";
	case ENOMEM: return "cannot allocate memory";
	case EACCES: return "permission denied";
	case ETXTBSY: return "text file busy";
	default: return 0;
	}
}

/* A CNI error (CNI SPEC, "Error") in our own words: 999 is libcni's code for
 * an internal one. Names of plugins and directories may hold what JSON has to
 * escape. */
static char *answer(char *end, const char *what, const char *of, long error)
{
	const char *parts[] = { what, of, error ? ": " : "", error && text_of(error) ? text_of(error) : "" };
	end = append(end, "{\"cniVersion\": \"1.0.0\", \"code\": 999, \"msg\": \"");
	for (int i = 0; i < 4; i++)
		for (const char *s = parts[i]; *s; s++) {
			if (*s == '"' || *s == '\\')
				*end++ = '\\';
			*end++ = (unsigned char)*s < ' ' ? '?' : *s;
		}
	if (error && !text_of(error))
		end = append_number(append(end, "errno "), error);
	return append(end, "\"}\n");
}

__attribute__((noreturn)) static void fail(const char *what, const char *of, long error)
{
	char *end = answer(out, what, of, error);
	write_all(1, out, end - out);
	quit(1);
}

/* The path RUN/pFROM/PLUGIN in its three parts. */
static void parse_path(const char *path)
{
	char *slash[2] = { 0, 0 };
	if (*path != '/' || length(path) >= sizeof run - 512)
		fail("this program is run by minicri only, not as ", path, 0);
	append(run, path);
	for (char *p = run; *p; p++)
		if (*p == '/')
			slash[0] = slash[1], slash[1] = p;
	if (!slash[0] || slash[0][1] != 'p')
		fail("this program is run by minicri only, not as ", path, 0);
	*slash[0] = *slash[1] = 0;
	append(from, slash[0] + 2);
	plugin = slash[1] + 1;
}

static char *next_field(char *p)
{
	while (p < settings_end && *p)
		p++;
	return p + 1;
}

static void read_settings(void)
{
	char path[PATH];
	append(append(path, run), "/run");
	long fd = call(OPENAT, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0);
	long n = fd < 0 ? fd : call(READ, fd, (long)settings, sizeof settings - 1, 0, 0);
	if (n < 0)
		fail("the run of this plugin has ended: ", path, -n);
	call(CLOSE, fd, 0, 0, 0, 0);
	settings_end = settings + n;
	version = settings;
	entrance = next_field(version);
	chain = next_field(entrance);
	directories = next_field(chain);
	programs = next_field(directories);
	if (programs > settings_end || n == sizeof settings - 1)
		fail("the run of this plugin is not described: ", path, 0);
}

static long spawn(unsigned long flags, unsigned long cgroup, int *pidfd)
{
	struct clone c;
	memset(&c, 0, sizeof c);
	c.flags = flags;
	c.cgroup = cgroup;
	c.pidfd = (unsigned long)pidfd;
	c.exit_signal = SIGCHLD;
	return call(CLONE3, (long)&c, sizeof c, 0, 0, 0);
}

static int wait_for(long pid)
{
	int status = 0;
	while (call(WAIT4, pid, (long)&status, 0, 0, 0) == -EINTR)
		;
	return status;
}

/* What a plugin runs is born in the cgroup, unless the plugin has moved or has
 * had it run by another process. Looking takes none of the locks that entering
 * waits for. */
static int inside(void)
{
	static char list[4096];
	char path[PATH], *end = append(path, entrance);
	if (same(version, "2"))
		append(end, "/cgroup.procs");
	long fd = call(OPENAT, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0);
	long n = fd < 0 ? fd : call(READ, fd, (long)list, sizeof list - 1, 0, 0);
	if (fd >= 0)
		call(CLOSE, fd, 0, 0, 0, 0);
	if (n < 0 || n == sizeof list - 1) /* not the whole list */
		return 0;
	unsigned long pid = call(GETPID, 0, 0, 0, 0, 0);
	for (char *line = list, *stop = list + n; line < stop; line++) {
		if (number(line) == pid)
			return 1;
		while (line < stop && *line != '\n')
			line++;
	}
	return 0;
}

/* On version 1 a process of one thread moves itself, and waits for no lock. On
 * version 2 it would; there a clone is born inside, and this process remains
 * outside to tell its parent the end. */
static void enter(void)
{
	int v2 = same(version, "2");
	long fd = call(OPENAT, AT_FDCWD, (long)entrance, (v2 ? O_RDONLY : O_WRONLY) | O_CLOEXEC, 0, 0);
	long error = fd;
	if (fd >= 0 && !v2)
		error = call(WRITE, fd, (long)"0", 1, 0, 0);
	if (fd >= 0 && v2)
		error = spawn(CLONE_INTO_CGROUP, fd, 0);
	if (error < 0)
		fail("enter the cgroup of the run: ", entrance, -error);
	call(CLOSE, fd, 0, 0, 0, 0);
	if (v2 && error > 0) {
		for (int i = 0; i < 3; i++)
			call(CLOSE, i, 0, 0, 0, 0);
		int status = wait_for(error);
		quit(status & 0x7f ? 128 + (status & 0x7f) : status >> 8 & 0xff);
	}
}

/* The note of the k-th plugin that FROM runs is RUN/nFROM-k; of the chain
 * itself, which is run by the daemon, RUN/nk.
 * What the plugin itself runs gets the directory RUN/pFROM-k. */
static unsigned long open_note(void)
{
	for (unsigned long k = 0;; k++) {
		char *name = append(append(note_path, run), "/n");
		char *end = append(name, from);
		append_number(*from ? append(end, "-") : end, k);
		note = call(OPENAT, AT_FDCWD, (long)note_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600, 0);
		if (note == -EEXIST)
			continue;
		if (note < 0)
			fail("note the run of a plugin: ", note_path, -note);
		append(append(append(links, run), "/p"), name);
		append(append(append(errors_path, run), "/e"), name);
		long error = call(SYMLINKAT, (long)"p", AT_FDCWD, (long)links, 0, 0);
		if (error < 0)
			fail("give the plugin its directory: ", links, -error);
		return k;
	}
}

static const char *verb_of(char **environment)
{
	for (; *environment; environment++) {
		const char *value = after(*environment, "CNI_COMMAND=");
		if (value)
			return value;
	}
	return "";
}

static void note_start(void)
{
	char text[PATH + 64], *end = append(text, plugin) + 1;
	char command[32];
	size n = 0;
	for (; n < sizeof command - 1 && verb[n]; n++)
		command[n] = verb[n];
	command[n] = 0;
	end = append(end, command) + 1;
	end = append_number(end, now(CLOCK_REALTIME)) + 1;
	write_all(note, text, end - text);
}

/* A result is an object (CNI SPEC, "Success"), and verbs without a result print
 * nothing. What begins otherwise is kept, to be shown. */
static int no_object(void)
{
	size i = 0;
	while (i < out_length && (out[i] == ' ' || out[i] == '\n' || out[i] == '\t' || out[i] == '\r'))
		i++;
	return same(verb, "ADD") && out_written == 0 && i < out_length && out[i] != '{';
}

static void note_end(int status, unsigned long took)
{
	char text[128], *end = text;
	size answered = (status || no_object()) && out_length > out_written ? out_length : 0;
	if (!status && answered > SHOWN)
		answered = SHOWN;
	if (answered > NOTED)
		answered = NOTED;
	end = append_number(end, status & 0x7f ? 0 : status >> 8 & 0xff) + 1;
	end = append_number(end, status & 0x7f) + 1;
	end = append_number(end, took) + 1;
	end = append_number(end, answered) + 1;
	end = append_number(end, err_length) + 1;
	write_all(note, text, end - text);
	write_all(note, out, answered);
	write_all(note, err, err_length);
}

/* The child: it becomes the plugin, which finds the plugins that it runs in
 * turn in a directory of its own. */
static void become(char **environment, int to, int errors, unsigned long mask)
{
	static char path_variable[PATH + 16];
	char *arguments[] = { real, 0 };
	append(append(path_variable, "CNI_PATH="), links);
	for (char **v = environment; *v; v++)
		if (after(*v, "CNI_PATH="))
			*v = path_variable;
	/* If the runner is killed, then so is its plugin, wherever it has moved. */
	call(PRCTL, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	call(DUP3, to, 1, 0, 0, 0);
	call(DUP3, errors, 2, 0, 0, 0);
	call(RT_SIGPROCMASK, SIG_SETMASK, (long)&mask, 0, sizeof mask, 0);
	long error = 0;
	for (int i = 0; i < BUSY_TRIES; i++) {
		struct time second = { 1, 0 };
		error = call(EXECVE, (long)real, (long)arguments, (long)environment, 0, 0);
		if (error != -ETXTBSY)
			break;
		call(NANOSLEEP, (long)&second, 0, 0, 0, 0);
	}
	fail("run the plugin ", real, -error);
}

static void keep_tail(const char *s, size n)
{
	if (n > TAIL)
		s += n - TAIL, n = TAIL;
	if (err_length + n > TAIL) {
		size drop = err_length + n - TAIL;
		for (size i = 0; i + drop < err_length; i++)
			err[i] = err[i + drop];
		err_length -= drop;
	}
	memcpy(err + err_length, s, n);
	err_length += n;
	/* In a file at once: if the run is killed, the end of the note is never written. */
	if (kept_errors < 0)
		kept_errors = call(OPENAT, AT_FDCWD, (long)errors_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600, 0);
	if (kept_errors >= 0)
		call(PWRITE64, kept_errors, (long)err, err_length, 0, 0);
}

/* Reads once from one of the plugin's pipes; false at the end. */
static int take(int fd, int is_out)
{
	static char buffer[TAIL];
	if (is_out && out_length == sizeof out) {
		if (out_passed >= MOST_OUT && !too_much) {
			too_much = 1;
			call(KILL, plugin_pid, SIGKILL, 0, 0, 0);
		}
		if (!too_much)
			write_all(1, out + out_written, out_length - out_written);
		out_passed += out_length;
		out_length = out_written = 0;
	}
	char *to = is_out ? out + out_length : buffer;
	long n = call(READ, fd, (long)to, is_out ? sizeof out - out_length : sizeof buffer, 0, 0);
	if (n == -EINTR)
		return 1;
	if (n <= 0)
		return 0;
	if (is_out) {
		out_length += n;
	} else {
		keep_tail(buffer, n);
		if (err_passed < MOST_ERR)
			write_all(2, buffer, n);
		err_passed += n;
	}
	return 1;
}

/* Follows the plugin until it ends, not until its pipes do: a child that it
 * leaves behind may hold them for as long as it likes. */
static int follow(long pid, int pidfd, int from_out, int from_err)
{
	struct poll p[] = { { pidfd, POLLIN, 0 }, { from_out, POLLIN, 0 }, { from_err, POLLIN, 0 } };
	while (!p[0].revents) {
		if (call(PPOLL, (long)p, 3, 0, 0, 0) < 0)
			continue;
		for (int i = 1; i < 3; i++)
			if (p[i].revents && !take(p[i].fd, i == 1))
				p[i].fd = -1;
	}
	for (int i = 1; i < 3; i++) {
		struct time none = { 0, 0 };
		for (int n = 0; n < MOST_AFTER && p[i].fd >= 0; n++)
			if (call(PPOLL, (long)&p[i], 1, (long)&none, 0, 0) <= 0 || !take(p[i].fd, i == 1))
				break;
	}
	return wait_for(pid);
}

static int run_plugin(char **environment)
{
	unsigned long mask = 0, pipe_signal = 1UL << (SIGPIPE - 1);
	int to[2], errors[2], pidfd = -1;
	/* The daemon may have gone: the plugin is to finish all the same. */
	call(RT_SIGPROCMASK, SIG_BLOCK, (long)&pipe_signal, (long)&mask, sizeof mask, 0);
	long error = call(PIPE2, (long)to, O_CLOEXEC, 0, 0, 0);
	if (error == 0)
		error = call(PIPE2, (long)errors, O_CLOEXEC, 0, 0, 0);
	long pid = error < 0 ? error : spawn(CLONE_PIDFD, 0, &pidfd);
	if (pid == 0)
		become(environment, to[1], errors[1], mask);
	if (pid < 0)
		fail("start the plugin ", real, -pid);
	call(CLOSE, to[1], 0, 0, 0, 0);
	call(CLOSE, errors[1], 0, 0, 0, 0);
	call(CLOSE, 0, 0, 0, 0, 0);
	plugin_pid = pid;
	return follow(pid, pidfd, to[0], errors[0]);
}

/* The settings end with pairs of a plugin and its program. */
static int find_plugin(void)
{
	for (char *name = programs; name < settings_end; name = next_field(real)) {
		real = next_field(name);
		if (same(name, plugin))
			return 1;
	}
	return 0;
}

static int failed_mark(int make)
{
	char path[PATH];
	append(append(path, run), "/failed");
	long fd = call(OPENAT, AT_FDCWD, (long)path, (make ? O_WRONLY | O_CREAT : O_RDONLY) | O_CLOEXEC, 0600, 0);
	if (fd >= 0)
		call(CLOSE, fd, 0, 0, 0, 0);
	return fd >= 0;
}

/* A plugin whose DEL fails does not keep the others of the chain from theirs:
 * libcni, which would stop, hears of it from the last one, before it removes
 * its cache of what ADD made. */
static int answer_of_del(int code, unsigned long k)
{
	int last = k + 1 >= number(chain);
	if (code != 0)
		failed_mark(1);
	if (!last) {
		out_length = out_written;
		return 0;
	}
	if (code == 0 && failed_mark(0)) {
		out_length = answer(out, "the DEL of another plugin of the chain failed", "", 0) - out;
		out_written = 0;
		return 1;
	}
	return code;
}

__attribute__((noreturn, used)) void start(long *stack)
{
	char **environment = (char **)(stack + 1 + *stack + 1), **v = environment;
	while (*v++)
		;
	const char *path = "";
	for (unsigned long *auxiliary = (unsigned long *)v; *auxiliary != AT_NULL; auxiliary += 2)
		if (*auxiliary == AT_EXECFN)
			path = (const char *)auxiliary[1];
	parse_path(path);
	read_settings();
	if (!*from || !inside())
		enter();
	unsigned long k = open_note(), began = now(CLOCK_MONOTONIC);
	verb = verb_of(environment);
	note_start();
	int status;
	if (find_plugin()) {
		status = run_plugin(environment);
	} else {
		static char what[2 * sizeof settings];
		append(append(append(append(what, plugin), " in "), directories), ": install it or set cni_bin_dir");
		out_length = answer(out, "failed to find the plugin ", what, 0) - out;
		status = 1 << 8;
	}
	if (too_much) {
		out_length = answer(out, "the answer has more than 4 MiB, which no CNI result has: ", plugin, 0) - out;
		out_written = 0;
		status = 1 << 8;
	}
	int code = status & 0x7f ? 128 + (status & 0x7f) : status >> 8 & 0xff;
	if (status & 0x7f && out_length == 0 && out_written == 0) {
		char what[PATH];
		append_number(append(append(what, plugin), " was ended by signal "), status & 0x7f);
		out_length = answer(out, "the plugin ", what, 0) - out;
	}
	note_end(status, now(CLOCK_MONOTONIC) - began);
	if (!*from && same(verb, "DEL"))
		code = answer_of_del(code, k);
	write_all(1, out + out_written, out_length - out_written);
	quit(code);
}
